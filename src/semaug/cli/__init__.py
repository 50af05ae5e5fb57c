"""The command line: one module for each command, with its name; `main` dispatches, `common` has shared parts.

Only this package knows flags, exit codes and how errors are printed. The library's errors name settings in backticks.
"""
