"""The ISDA loss (equations 1 to 3). It needs torch alone.

| module          | subject                                                                |
|-----------------|------------------------------------------------------------------------|
| `loss`          | augmented logits, the ISDA loss, and the loss as a module              |
| `strength`      | the schedule of λ                                                      |
| `sources`       | where Σ comes from: constant, class-wise statistics, CovNet            |
| `covariance`    | the forms of Σ: diagonal and full                                      |
| `quadratic`     | the quadratic form of a diagonal Σ in chunks of classes                |
| `head`          | the linear layer that makes the logits                                 |
| `precision`     | fp32 inside autocast, and bounds that prevent overflow                 |
"""
