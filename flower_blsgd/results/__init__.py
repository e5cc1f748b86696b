"""Progress and results of a run: figures, pictures and the results folder."""
