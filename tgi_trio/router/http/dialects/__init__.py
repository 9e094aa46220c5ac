"""The chat APIs, a module for each: bodies to conversations, answers to bytes."""
