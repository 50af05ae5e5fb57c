"""Atomic files, progress, signals, processes and sums over ranks: what every other room may use."""
