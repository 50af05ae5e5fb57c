"""The report: one HTML file with the figures and pictures of one run or of several, which needs nothing else."""

from semaug.report.page import write_report

__all__ = ["write_report"]
