"""Steps that a device has recorded: how they are captured, filled and replayed."""
