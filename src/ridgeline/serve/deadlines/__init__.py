"""Requests that must be done in time: promised, or refused at once."""
