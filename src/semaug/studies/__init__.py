"""Comparisons over seeds, benchmarks, the tables and figures of the paper, and Theorem 1 in numbers."""
