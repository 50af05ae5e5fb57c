"""The page of ``semaug serve``, to try a trained model on an image in the browser, and its API for programs.

answers  classes, nearest training images, and both along directions of Σ
api      images of a request, predictions, and the OpenAPI description
app      the web application and its protection
"""
