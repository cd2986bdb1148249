"""Pages, tables, charts and verdicts made of evaluation figures."""
