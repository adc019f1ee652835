"""Sessions on disk: packs of rows, a checkpoint and a journal."""
