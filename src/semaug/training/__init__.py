"""Settings, the table of methods, batches, the trainer, checkpoints and tracking."""
