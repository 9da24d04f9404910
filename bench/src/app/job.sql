PRAGMA temp_store = MEMORY;
CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price INTEGER, seller INTEGER);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
INSERT INTO item SELECT i, printf('item %d of a catalogue, in colour %d, described in %d words', i, i*7919%1009, i%97), i*104729%100003, i*15485863%50021 FROM n;
CREATE INDEX by_seller ON item(seller, price);
CREATE INDEX by_name ON item(name);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows} / 3)
SELECT sum(price), count(*) FROM n JOIN item ON item.id = n.i * 7919 % {rows} + 1;
SELECT seller % 97, count(*), sum(price), max(name) FROM item GROUP BY 1 ORDER BY 1;
UPDATE item SET price = price + 1 WHERE seller % 5 = 0;
SELECT count(*), sum(a.price) FROM item a JOIN item b ON b.name = a.name AND a.id % 3 = 0;
SELECT seller, sum(price) FROM item INDEXED BY by_seller WHERE seller % 1000 = 1 GROUP BY seller;
