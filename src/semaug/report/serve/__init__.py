"""A page to try a model: what it says of an image, the nearest training images, and where its Σ leads."""
