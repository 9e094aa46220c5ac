"""The torch backend's step beside the least that torch can do."""
