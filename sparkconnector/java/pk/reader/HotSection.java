// Reads a hot range from the leader's log: the frames of a fetch that Python prepared.
//
// The reply is read as sparkconnector/scan.py and sparkconnector/rows.py read it, batch by batch.
//
// Local invariants
//   H1  A row is returned exactly if its offset lies in the range and its batch is neither a control batch
//       nor part of an aborted transaction (sparkconnector/rows A1).
//   H2  Before a batch is looked into, its place between its neighbours and its checksum are verified, then
//       its structure (rules S7, L13).
//   H3  `position` moves past a batch when the batch is returned or has no rows to return.
package pk.reader;

import java.io.IOException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

final class HotSection implements Section {
  private static final long GRANT_BYTES = 2 << 20;

  private final Plan.Section section;
  private final StructField[] fields;
  private final Columns columns;
  private final int decodedBytesMost;
  private final FetchStream stream;
  private List<BatchHeader> batches = new ArrayList<>();
  private IOException damage; // what follows `batches` in the payload
  private int index;
  private FetchReply.Part part;
  private long before; // where the next batch is expected
  private long from; // the position that the current reply answers
  private long owed;
  private long position;
  private long bytes;

  HotSection(Plan.Section section, StructType required) throws IOException {
    this.section = section;
    fields = required.fields();
    columns = new Columns(section.topic, section.partition, required);
    decodedBytesMost = section.details.path("decoded_bytes_max").asInt();
    position = section.start;
    before = section.start;
    stream = new FetchStream(
        section.details.path("host").asText(),
        section.details.path("port").asInt(),
        section.details.path("frame_bytes_max").asLong());
    try {
      stream.send(decoded("hello"));
      stream.receive();
      long protocol =
          FetchReply.protocolOf(stream.frame, stream.headAt, stream.payloadAt);
      if (protocol < section.details.path("protocol_min").asLong()
          || protocol > section.details.path("protocol").asLong()) {
        throw new IOException("the broker speaks protocol " + protocol);
      }
      stream.send(decoded("fetch"));
    } catch (IOException | RuntimeException cause) {
      stream.close();
      throw cause;
    }
  }

  private byte[] decoded(String name) {
    return Base64.getDecoder().decode(section.details.path(name).asText());
  }

  @Override
  public ColumnarBatch next() throws IOException {
    while (true) {
      if (index == batches.size()) {
        if (damage != null) {
          throw damage;
        }
        if (part != null) {
          position = Math.max(position, part.nextOffset);
          before = position;
          part = null;
        }
        if (position >= section.end) {
          return null;
        }
        receive();
        continue;
      }
      ColumnarBatch found = read();
      if (found != null) {
        return found;
      }
    }
  }

  /** Receives the next reply and finds the batches in it. */
  private void receive() throws IOException {
    if (owed >= GRANT_BYTES) {
      stream.grant(owed);
      owed = 0;
    }
    stream.receive();
    bytes += stream.frame.length;
    FetchReply reply = new FetchReply(stream.frame, stream.headAt, stream.payloadAt);
    long at = stream.payloadAt;
    batches = new ArrayList<>();
    index = 0;
    for (FetchReply.Part each : reply.parts) {
      long end = at + each.payloadBytes;
      if (each.payloadBytes < 0 || end > stream.frame.length) {
        throw new IOException("a frame is shorter than it says");
      }
      owed += each.payloadBytes;
      if (each.positionId == section.details.path("position_id").asLong()) {
        if (part != null || each.nextOffset < position) {
          throw new IOException("a fetch went back to " + each.nextOffset);
        }
        part = each;
        from = position;
        find((int) at, (int) end);
      }
      at = end;
    }
  }

  private void find(int start, int end) {
    int at = start;
    try {
      while (at < end) {
        BatchHeader each = new BatchHeader(stream.frame, at, end);
        batches.add(each);
        at += each.length;
      }
    } catch (IOException cause) {
      damage = cause; // thrown when the batches in front of it were returned
    }
  }

  /** Returns the rows of the next batch; null if it has none. */
  private ColumnarBatch read() throws IOException {
    BatchHeader one = batches.get(index);
    boolean isLast = index + 1 == batches.size();
    long after = !isLast ? batches.get(index + 1).baseOffset
        : damage == null ? part.nextOffset : one.nextOffset();
    one.checkPlace(before, after, index == 0, part.dense); // H2
    one.verify();
    ColumnarBatch found = null;
    if (one.nextOffset() > from && one.baseOffset < section.end && one.count > 0
        && !one.has(BatchHeader.CONTROL) && !isAborted(one)) { // H1
      BatchBody body = new BatchBody(one, decodedBytesMost);
      int first = body.rowAt(from);
      int end = body.rowAt(section.end);
      found = first < end ? columnsOf(one, body, first, end - first) : null;
    }
    index++;
    before = one.nextOffset();
    position = Math.max(position, Math.min(before, section.end)); // H3
    return found;
  }

  private boolean isAborted(BatchHeader one) {
    if (!one.has(BatchHeader.TRANSACTIONAL)) {
      return false;
    }
    for (long[] each : part.aborted) {
      if (each[0] == one.producerId && each[1] <= one.baseOffset && one.baseOffset <= each[2]) {
        return true;
      }
    }
    return false;
  }

  private ColumnarBatch columnsOf(BatchHeader header, BatchBody body, int first, int rows)
      throws IOException {
    ColumnVector[] found = new ColumnVector[fields.length];
    for (int at = 0; at < found.length; at++) {
      String name = columns.name(at);
      switch (name) {
        case "topic":
        case "partition":
          found[at] = columns.constant(at, rows);
          break;
        case "timestamptype":
          ConstantColumnVector kind = new ConstantColumnVector(rows, fields[at].dataType());
          kind.setInt(header.has(BatchHeader.LOG_APPEND_TIME) ? 1 : 0);
          found[at] = kind;
          break;
        default:
          found[at] = body.column(name, fields[at].dataType(), first, rows);
      }
    }
    return new ColumnarBatch(found, rows);
  }

  @Override
  public long position() {
    return position;
  }

  @Override
  public long bytes() {
    return bytes;
  }

  @Override
  public void close() throws IOException {
    stream.close();
  }
}
