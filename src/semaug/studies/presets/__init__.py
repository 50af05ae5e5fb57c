"""One module for each table or figure of the paper.

A module defines ``EXPERIMENT``, and :mod:`semaug.studies.registry` finds it. Its docstring states the settings and the
results of the paper, and the time to expect.
"""
