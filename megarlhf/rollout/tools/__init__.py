"""Calls of tools: forms in which models write them, MCP servers and Python that execute them, descriptions."""
