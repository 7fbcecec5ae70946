"""Receipts of a server's answers: imported when a request asks for one."""
