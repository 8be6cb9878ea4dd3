"""Who watches how an engine shares out its slots, room and steps: priorities, flows, prefixes, pace."""
