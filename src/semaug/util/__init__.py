"""Tools that every other package may use.

===========  =========================================================
module       subject
===========  =========================================================
errors       exceptions that users of the library see
names        names and numbers in messages, tables and CSV files
ranges       the ranges of settings
files        atomic writes
untrusted    bounded reads of files of unknown origin; JSON of a form
locks        one writer per folder
processes    ordered maps over worker processes
progress     messages and progress bars
signals      SIGINT and SIGTERM
threads      how threads on the CPU wait, and how many there are
devices      the device to compute on
distributed  ranks, sums and copies over processes (torch.distributed)
===========  =========================================================
"""
