"""Methods of other papers for comparison, as plug-ins of flwr-distill: docs/plugins.md."""
