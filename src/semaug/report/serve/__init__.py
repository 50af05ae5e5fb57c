"""The page of ``semaug serve``: try a trained model on an image in the browser.

answers  classes, nearest training images, and both along directions of Σ
app      the web application and its protection
"""
