"""How a shell calls the package: ``ds-trainer`` and its subcommands, a module each."""
