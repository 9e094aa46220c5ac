"""The page at /docs: the OpenAPI document as a list to unfold, without assets."""

from __future__ import annotations

from typing import Final

DOCS_PAGE: Final = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>tgi-trio API</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
 summary { cursor: pointer; padding: .4rem 0 }
 summary b { display: inline-block; width: 4rem; text-transform: uppercase }
 pre { background: #8881; overflow: auto; padding: .8rem }
</style>
<h1>tgi-trio</h1>
<p>The routes of this server. The same as a document: <a href="api-doc/openapi.json">OpenAPI</a>.
<main id="routes">Reading the document&hellip;</main>
<script>
 const show = (document_, value) => value && value.$ref
   ? document_.components.schemas[value.$ref.split("/").pop()] : value;
 const add = (parent, tag, text) => {
   const node = document.createElement(tag); node.textContent = text;
   parent.append(node); return node;
 };
 fetch("api-doc/openapi.json").then(answer => answer.json()).then(api => {
   const main = document.getElementById("routes"); main.textContent = "";
   for (const [path, methods] of Object.entries(api.paths))
     for (const [method, route] of Object.entries(methods)) {
       const box = add(main, "details", ""), head = add(box, "summary", "");
       add(head, "b", method); add(head, "code", path); head.append(" " + route.summary);
       const parts = {};
       if (route.requestBody) for (const [type, part] of Object.entries(route.requestBody.content))
         parts["body, " + type] = part.schema;
       for (const [status, answer] of Object.entries(route.responses))
         for (const [type, part] of Object.entries(answer.content || {"": {}}))
           parts[status + " " + answer.description + " " + type] = part.schema;
       for (const [name, schema] of Object.entries(parts)) {
         add(box, "p", name);
         if (schema) add(box, "pre", JSON.stringify(show(api, schema), null, 1));
       }
     }
   add(main, "h2", "Types");
   for (const [name, schema] of Object.entries(api.components.schemas)) {
     const box = add(main, "details", ""); add(box, "summary", name);
     add(box, "pre", JSON.stringify(schema, null, 1));
   }
 });
</script>
"""
