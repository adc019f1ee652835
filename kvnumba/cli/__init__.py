"""The command line: parsing, printing, exit codes."""
