"""`llmserve bench`: load.py defines loads and their statistics, client.py sends requests, command.py is the command."""
