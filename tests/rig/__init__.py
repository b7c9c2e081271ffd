"""The fault rig: it breaks things for real, on three engines."""
