"""Studies: comparisons of methods, the benchmark, and the paper's tables and figures.

| module                            | subject                                                                    |
|-----------------------------------|----------------------------------------------------------------------------|
| `compare`, `grid`                 | methods compared on one data set; the runs of such a comparison            |
| `paired`, `tables`                | paired statistics; tables as text                                          |
| `workers`                         | training runs in worker processes                                          |
| `reproduce`                       | run what is missing of the paper's experiments, and report all results     |
| `cells`, `presets`                | what an experiment is; one module for each, and their discovery            |
| `scales`                          | how a cell becomes a training run, at the paper's scale and at a small one |
| `results`                         | scores of runs, and other measurements (times, sizes, pictures)            |
| `page`                            | the report and its charts                                                  |
| `bench`                           | the cost of a training step                                                |
| `theorem`                         | Theorem 1 in numbers                                                       |
| `demo`                            | methods on the embedded birds                                              |
"""
