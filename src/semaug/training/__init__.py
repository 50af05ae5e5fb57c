"""Training a network by any method, with exact resumption.

| module          | subject                                                               |
|-----------------|-----------------------------------------------------------------------|
| `settings`      | `TrainConfig`, all settings of a run                                  |
| `methods`       | the table of methods                                                  |
| `recipes`       | the table of recipes: named defaults of settings                      |
| `trainer`       | `train`: the loop over epochs and steps                               |
| `optimization`  | the network with its optimiser, learner, schedule and moving average  |
| `run_data`      | reading, checking and decoding the images                             |
| `probing`       | linear probes, trained on cached features                             |
| `batches`       | which images a step gets, and how they are transformed                |
| `state`         | progress of a run, as a checkpoint holds it                           |
| `checks`        | divergence, BatchNorm over one value, a CovNet that is not learning   |
| `run_directory` | the files of a run                                                    |
| `checkpoints`   | the format of a checkpoint file                                       |
| `tracking`      | TensorBoard and Weights & Biases                                      |
"""
