"""Trained classifiers in use: read, evaluate, predict, export."""
