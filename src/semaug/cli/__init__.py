"""The command line: one module for each command, named like it; `main` dispatches, `common` is what they share.

Only this package knows flags, exit codes and how errors are printed. The library's errors name settings in backticks.
"""
