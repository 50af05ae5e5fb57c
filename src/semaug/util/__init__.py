"""Tools that every other package may use.

============  ========================================================
module        subject
============  ========================================================
errors        exceptions that users of the library see
files         atomic writes and size-limited JSON reads
processes     ordered maps over worker processes
progress      messages and progress bars
signals       SIGINT and SIGTERM
spreadsheets  names in CSV files that would be formulas
threads       how threads on the CPU wait, and how many there are
distributed   ranks, sums and copies over processes (torch.distributed)
============  ========================================================
"""
