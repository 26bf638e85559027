"""`llmserve bench`: load.py says what is asked and counts, client.py asks, command.py is the command and its tables."""
