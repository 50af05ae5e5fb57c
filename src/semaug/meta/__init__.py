"""Algorithm 1: pseudo, meta and real update, and the exact meta-gradient at a fraction of the cost.

| module            | subject                                                                                |
|-------------------|----------------------------------------------------------------------------------------|
| `algorithm`       | Algorithm 1 and its pipelined order: read this beside the paper                         |
| `executor`        | losses and gradients: micro-batches, sums over ranks, optimiser steps                  |
| `passes`          | forward passes of micro-batches                                                        |
| `precision`       | autocast and the gradient scaler                                                       |
| `losses`          | L_train and L_meta as functions of features and head                                   |
| `gradient`        | the meta-gradient: choice of the engine                                                |
| `jvp`             | the fast engine: one forward-mode pass                                                 |
| `double_backward` | the reference engine: a second-order graph                                             |
| `problem`         | the function that the engines differentiate                                            |
| `sensitivity`     | an optimiser's step as a function of the gradient                                      |
| `optimizers`      | optimisers whose steps a CUDA graph can hold                                           |
| `graphs`          | training steps as CUDA graphs                                                          |
| `updates`         | data that one update hands to the next                                                 |
| `diagnostics`     | metrics of a half step                                                                 |
| `state`           | the learner's state in checkpoints                                                     |
| `learner`         | the public classes `LearnableAugmentation` and `JointAugmentation`                     |
| `mixing`          | image-level methods that need the network: `SnapMix` and `ManifoldMixup`               |
"""
