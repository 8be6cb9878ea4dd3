"""What lies between the parties: ordered connections, rings, links between engines, transfers of pages."""
