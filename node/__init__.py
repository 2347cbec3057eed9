"""The long-lived node: settings, supervisor, SuperNode, warm executor and worker."""
