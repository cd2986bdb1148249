"""What happens around training: set-up, processes, checkpoints, signals, logs."""
