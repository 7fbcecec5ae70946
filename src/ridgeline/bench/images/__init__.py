"""The load of many users on an endpoint that makes images."""
