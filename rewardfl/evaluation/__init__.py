"""What tools/evaluate.py, compare_runs and the reports are made of: sampling, judging, figures, pages."""
