"""Where weights and buffers lie in memory. numpy only: nothing here is compiled."""
