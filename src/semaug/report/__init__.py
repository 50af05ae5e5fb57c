"""Reports and figures of runs.

| module                | subject                                                                  |
|-----------------------|--------------------------------------------------------------------------|
| `page`                | the report of one run or several, as one HTML file                       |
| `reading`             | the files of run directories                                             |
| `curves`              | metrics over the epochs                                                  |
| `charts`, `canvas`    | charts drawn with matplotlib; their style, and figures as SVG or PNG     |
| `html`                | pages in a single file                                                   |
| `figures`             | figures of runs, the paper's and others                                  |
| `serve`               | a page to try a trained model in the browser                             |
"""

from semaug.report.page import write_report

__all__ = ["write_report"]
