"""An instance that takes part in another server: where it registers, how it asks, and when it leaves."""
