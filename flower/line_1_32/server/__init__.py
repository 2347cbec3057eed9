"""Of a ServerApp: how messages go out and replies come in."""
