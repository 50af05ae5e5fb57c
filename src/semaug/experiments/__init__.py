"""Experiments that check the paper's claims; each is a module that runs by itself."""
