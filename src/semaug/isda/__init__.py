"""The ISDA loss (equations 1 to 3): augmented logits, forms of Σ, and where Σ comes from."""
