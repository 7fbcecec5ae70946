"""Receipts of a server's answers: imported when somebody asks for one."""
