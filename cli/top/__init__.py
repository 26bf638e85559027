"""`llmserve top`: source.py gets samples, model.py turns them into snapshots, view.py draws these, keys.py handles
keys.
"""
