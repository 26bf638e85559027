"""`llmserve top`: source.py gets samples, model.py makes a snapshot of them, view.py draws it, keys.py steers it."""
