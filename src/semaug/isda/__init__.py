"""The ISDA loss (equations 1 to 3). It needs only torch.

| module       | subject                                                      |
|--------------|--------------------------------------------------------------|
| `loss`       | augmented logits and the ISDA loss as functions              |
| `criterion`  | the ISDA loss as a module                                    |
| `sources`    | where Σ comes from: constant, class-wise statistics, CovNet  |
| `checks`     | shapes, types and ranges of the loss's inputs                |
| `covariance` | the forms of Σ: diagonal and full                            |
| `strength`   | λ during training: the schedule, or the automatic strength   |
| `quadratic`  | the quadratic form of a diagonal Σ, in chunks of classes     |
| `head`       | the linear layer that maps features to logits                |
| `precision`  | fp32 inside autocast, and bounds that prevent overflow       |
"""
