"""What nodes, servers and SuperLinks say to each other beyond Flower 1.32."""
