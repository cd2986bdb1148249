"""What the training scripts are made of: set-up, processes, checkpoints, logs, alarms."""
