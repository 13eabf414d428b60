"""Questions asked of a script."""
