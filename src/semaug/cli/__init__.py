"""The command line: one module for each command.

| module                                                        | subject                                              |
|---------------------------------------------------------------|------------------------------------------------------|
| `main`                                                        | dispatch, exit codes, how errors are printed         |
| `common`                                                      | what commands share: device, flags, command lines    |
| `train`, `evaluate`, `predict`, `export`, `serve`, …          | a dataclass of options with a method `run`           |

Only this package knows flags and exit codes. The library raises errors that name settings in backticks.
"""
