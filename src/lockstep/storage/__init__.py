"""Files that survive a crash: written beside their place, hashed, synced, and committed by one rename."""
